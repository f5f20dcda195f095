"""The trainings: of the bundled model and the draft models, of an EAGLE-1 head, of streams."""
