"""Pass 2, rules: how each aten op's dims correspond. A start that finds its plan needs none: `own`
registers them when a program is planned, or a rule is asked for or stated.
"""
