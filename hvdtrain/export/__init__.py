"""Write a trained model as a file that PyTorch, ONNX Runtime, Keras or TensorFlow load without hvdtrain."""
