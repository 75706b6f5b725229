"""The parts of systems: requests, runners, and the engines of rows and of tiles."""
