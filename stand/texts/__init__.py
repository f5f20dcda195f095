"""Between texts and tokens: prompts on the way in, pieces of a stream on the way out, and where a row stops."""
