"""What networks are found on and judged by: documents, and a model without some channels."""
