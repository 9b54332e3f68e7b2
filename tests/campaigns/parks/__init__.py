"""Groups that set messages aside, killed and stopped at any moment, and a plain account of each message."""
