"""Handing messages out and hearing what is done, whoever says what is held."""
