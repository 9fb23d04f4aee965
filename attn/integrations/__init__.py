"""Adapters to other projects; each module imports its project only when it is used."""
