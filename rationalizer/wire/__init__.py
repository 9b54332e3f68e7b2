"""What can be appended, and its bytes (section 2): records, what is well formed, msgpack read without trusting it."""
