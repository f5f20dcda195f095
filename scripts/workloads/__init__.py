"""What measurements run on: real models that come from a package index, and written problems with integer answers."""
