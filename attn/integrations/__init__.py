"""Adapters to the projects that people already use; each module imports its project when it is used, never before."""
