"""The choice of a backend, with reasons: platforms, preferences, plug-ins, verdicts."""
