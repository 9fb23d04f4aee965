"""Reports for people: which backend was chosen for a layer, a model or a machine, and why."""
