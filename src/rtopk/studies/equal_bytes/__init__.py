"""Every method at equal bytes."""
