"""What the report draws: a module for each group of charts."""
