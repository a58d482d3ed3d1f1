"""The tests by layer, and in `support` what they share."""
