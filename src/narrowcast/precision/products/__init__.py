"""Products in a format: operands brought into it, products emulated, regions around them."""
