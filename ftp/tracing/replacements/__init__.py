"""Functions of torch and of other libraries that are replaced while a program is traced."""
