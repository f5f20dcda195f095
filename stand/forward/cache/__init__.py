"""What a model keeps of every row between steps: keys and values, or states; and the memory for them."""
