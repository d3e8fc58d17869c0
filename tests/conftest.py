"""What every test shares: nothing yet but a place for it."""
