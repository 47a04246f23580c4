"""The configurations of published models, and the headers that llama.cpp's conversion makes of them."""
