"""How train_reasoner.py and train_drafters.py train."""
