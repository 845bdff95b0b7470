"""What the speed benchmark compares: one file a peer, each with a function that builds its train
step.
"""
