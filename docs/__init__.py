"""Documents, and the tables in them that are made from records and from the commands."""
