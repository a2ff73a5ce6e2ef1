"""Other people's layouts: the codecs that they use, and what is needed to read and write them."""
