"""Which backend is chosen, and why: platforms, preferences, plug-ins, verdicts."""
