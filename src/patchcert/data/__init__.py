"""Images and labels, read from official files whose checksums are verified."""

from patchcert.data.files import class_names as class_names
from patchcert.data.files import load_dataset as load_dataset
from patchcert.data.folder import ImageShape as ImageShape
from patchcert.data.sources import SOURCES as SOURCES
from patchcert.data.sources import count_test_images as count_test_images
from patchcert.data.split import Dataset as Dataset
from patchcert.data.split import Split as Split
from patchcert.data.split import shown_classes as shown_classes
