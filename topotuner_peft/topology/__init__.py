"""Row clouds, their persistence diagrams, and the distance between two diagrams."""
