"""The group plane: coordinated groups (section 5), and topics shared by key (section 6)."""
