"""What people look at: tables for the terminal, pictures, the demo's page."""
