"""What a member of a coordinated group does: it joins, beats, takes up what it owns, lets go what is revoked (G20)."""
