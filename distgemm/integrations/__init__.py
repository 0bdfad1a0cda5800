"""Plug-ins for frameworks that do not call torch's fused ops. They import the framework when they are called."""
