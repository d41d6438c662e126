"""What follows a convolution in the same kernel: steps on a row of channels, and the store of the finished row."""
