"""A page in the browser that shows how a model reads what is typed, and lets it go on from there."""
