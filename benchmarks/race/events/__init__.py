"""What is measured, an event a module."""
