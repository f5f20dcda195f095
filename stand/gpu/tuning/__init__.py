"""What is chosen for one GPU: tiles by its limits, products by measurement."""
