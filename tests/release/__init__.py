"""What is released: wheel and source package, built, looked through, and used where there is no checkout."""
