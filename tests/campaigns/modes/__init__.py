"""A live group changed from mode to mode, and between kinds of group, with a plain account of each message."""
