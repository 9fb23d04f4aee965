"""Random cases for the conformance suite, and their minimisation."""
