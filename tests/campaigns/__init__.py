"""Campaigns that prove the product: hostile records, small scope, chaos, soak. ``make fuzz exhaustive chaos soak``."""
