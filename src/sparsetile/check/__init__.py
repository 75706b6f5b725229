"""What checks and measures products: references, error bounds, timing, pictures, digests."""
