"""How the ranks of a job find each other, and what moves data between them."""
