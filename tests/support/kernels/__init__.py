"""Cases, references and checks for tactics."""
