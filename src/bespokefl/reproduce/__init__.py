"""`bespoke reproduce`: run what a paper ran, and put its numbers beside ours."""
