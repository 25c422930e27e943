"""What speculation will bring before it is tried: chances of guesses, costs of steps, memory, and what follows from them."""
