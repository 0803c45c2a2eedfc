"""What turns numbers into advice, pages and commands."""
