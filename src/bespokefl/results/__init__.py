"""What a run leaves behind, and what people look at: files and tables."""
