"""Every private torch symbol that gulliver uses, in one place, each with a test of its own."""
