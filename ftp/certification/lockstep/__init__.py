"""Run the recorded programs of all ranks side by side, in any domain of numbers."""
