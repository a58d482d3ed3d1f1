"""What tests share: models, references, cases, limits, and programs that a test runs as a process of its own."""
