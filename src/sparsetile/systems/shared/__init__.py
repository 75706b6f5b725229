"""What several systems launch with: geometry, bound products, epilogues, tile runners."""
