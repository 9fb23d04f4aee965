"""What a choice was and why, for people: reports on layers, models and machines."""
