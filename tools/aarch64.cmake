# Cross-compilation with Debian's g++-aarch64-linux-gnu: cmake -DCMAKE_TOOLCHAIN_FILE=tools/aarch64.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
