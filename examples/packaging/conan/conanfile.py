"""luna.h as a Conan 2 package, of the sources that this file lies in: conan create examples/packaging/conan"""
import os
import re

from conan import ConanFile
from conan.tools.cmake import CMake, cmake_layout
from conan.tools.files import copy


class Luna(ConanFile):
    name = "luna"
    license = "MIT OR Unlicense"
    description = "Luna attention, its models and their training in one C header"
    package_type = "static-library"
    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeToolchain"

    @property
    def root(self):
        return os.path.join(self.recipe_folder, "..", "..", "..")

    def set_version(self):
        with open(os.path.join(self.root, "luna.h"), encoding="utf-8") as header:
            self.version = re.search(r'#define LUNA_VERSION "(.*)"', header.read())[1]

    def export_sources(self):
        for pattern in ("luna.h", "luna_cuda.cuh", "LICENSE", "examples/packaging/cmake/*"):
            copy(self, pattern, src=self.root, dst=self.export_sources_folder)

    def configure(self):
        self.settings.rm_safe("compiler.libcxx")
        self.settings.rm_safe("compiler.cppstd")

    def layout(self):
        cmake_layout(self)

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder="examples/packaging/cmake")
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", src=self.source_folder, dst=os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        self.cpp_info.libs = ["luna"]
        self.cpp_info.set_property("cmake_target_name", "luna::luna")
        if self.settings.os in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["m", "pthread"]
