"""How train_reasoner.py trains the bundled model and the draft models, and train_eagle.py a head."""
