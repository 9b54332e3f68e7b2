"""The group plane: coordinated groups with generations (sections 5 and 6)."""
